//! Answers as a Parquet file: flat columns that may be null, compressed by zstd.

use std::{fs::File, io, path::Path, sync::Arc};

use parquet::{
    basic::{Compression, LogicalType, Repetition, Type as Physical, ZstdLevel},
    data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, Int64Type},
    file::{
        properties::WriterProperties,
        writer::{SerializedColumnWriter, SerializedFileWriter},
    },
    schema::types::Type,
};
use serde_json::{Map, Value};

use super::{Answers, Column};
use crate::answers::{Kind, flat, text};

/// Rows of a row group, and bytes of their texts: what memory holds.
const GROUP_ROWS: usize = 20_000;
const GROUP_BYTES: usize = 32 << 20;

/// Writes the answers.
pub(super) fn write(answers: &dyn Answers, columns: &[Column], to: &Path) -> io::Result<()> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_created_by("tritmill".to_owned())
        .build();
    let file = File::create(to)?;
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema(columns)?), Arc::new(properties))?;
    let mut group: Vec<Values> = columns.iter().map(|column| Values::of(column.kind)).collect();
    let (mut rows, mut bytes) = (0, 0);
    answers.each(&mut |answered| {
        let row = flat(&answered.line);
        for (column, values) in columns.iter().zip(&mut group) {
            let from: &Map<String, Value> = if column.carried { &answered.carried } else { &row };
            bytes += values.add(from.get(&column.key).unwrap_or(&Value::Null));
        }
        rows += 1;
        if rows == GROUP_ROWS || bytes >= GROUP_BYTES {
            (rows, bytes) = (0, 0);
            write_group(&mut writer, &mut group)?;
        }
        Ok(())
    })?;
    if rows > 0 {
        write_group(&mut writer, &mut group)?;
    }
    writer.into_inner()?.sync_all()
}

fn schema(columns: &[Column]) -> io::Result<Type> {
    let fields = columns.iter().map(|column| {
        let (physical, logical) = match column.kind {
            Kind::Boolean => (Physical::BOOLEAN, None),
            Kind::Integer => (Physical::INT64, None),
            Kind::Number => (Physical::DOUBLE, None),
            Kind::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        };
        let field = Type::primitive_type_builder(&column.name, physical)
            .with_repetition(Repetition::OPTIONAL)
            .with_logical_type(logical);
        Ok(Arc::new(field.build()?))
    });
    let fields: io::Result<Vec<_>> = fields.collect();
    Ok(Type::group_type_builder("answers").with_fields(fields?).build()?)
}

fn write_group(writer: &mut SerializedFileWriter<File>, group: &mut [Values]) -> io::Result<()> {
    let mut columns = writer.next_row_group()?;
    for values in group {
        let Some(column) = columns.next_column()? else { break };
        values.write(column)?;
    }
    columns.close()?;
    Ok(())
}

/// The values of a column in a row group, and for each row whether it has one.
struct Values {
    present: Vec<i16>,
    typed: Typed,
}

/// Values of one kind.
enum Typed {
    Booleans(Vec<bool>),
    Integers(Vec<i64>),
    Numbers(Vec<f64>),
    Texts(Vec<ByteArray>),
}

impl Values {
    fn of(kind: Kind) -> Self {
        let typed = match kind {
            Kind::Boolean => Typed::Booleans(Vec::new()),
            Kind::Integer => Typed::Integers(Vec::new()),
            Kind::Number => Typed::Numbers(Vec::new()),
            Kind::Text => Typed::Texts(Vec::new()),
        };
        Self { present: Vec::new(), typed }
    }

    /// Adds the value of a row and returns the bytes that it takes.
    fn add(&mut self, value: &Value) -> usize {
        let bytes = match &mut self.typed {
            Typed::Booleans(values) => value.as_bool().map(|value| values.push(value)).map(|()| 1),
            Typed::Integers(values) => value.as_i64().map(|value| values.push(value)).map(|()| 8),
            Typed::Numbers(values) => value.as_f64().map(|value| values.push(value)).map(|()| 8),
            Typed::Texts(values) => text(value).map(|text| {
                let bytes = text.len();
                values.push(text.into_bytes().into());
                bytes
            }),
        };
        self.present.push(i16::from(bytes.is_some()));
        bytes.unwrap_or_default()
    }

    /// Writes the values and forgets them.
    fn write(&mut self, mut column: SerializedColumnWriter<'_>) -> io::Result<()> {
        let present = Some(std::mem::take(&mut self.present));
        let present = present.as_deref();
        match &mut self.typed {
            Typed::Booleans(values) => {
                column.typed::<BoolType>().write_batch(&std::mem::take(values), present, None)?
            }
            Typed::Integers(values) => {
                column.typed::<Int64Type>().write_batch(&std::mem::take(values), present, None)?
            }
            Typed::Numbers(values) => {
                column.typed::<DoubleType>().write_batch(&std::mem::take(values), present, None)?
            }
            Typed::Texts(values) => column.typed::<ByteArrayType>().write_batch(
                &std::mem::take(values),
                present,
                None,
            )?,
        };
        column.close()?;
        Ok(())
    }
}
