//! Spans of `tracing` in the traces of OpenTelemetry. Without its layer all of this does nothing.

use opentelemetry::{
    Context, SpanId, TraceFlags, TraceId,
    trace::{SpanContext, Status, TraceContextExt as _, TraceState},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::TraceParent;

impl TraceParent {
    /// Returns the position of a span in its trace; `None` without a layer that gives spans one.
    /// A span that is not recorded has one, so that its jobs are not recorded either.
    pub fn of_span(span: &Span) -> Option<Self> {
        let context = span.context();
        let span = context.span();
        let context = span.span_context().clone();
        if !context.is_valid() {
            return None;
        }
        let flags = context.trace_flags().to_u8();
        Some(Self(format!("00-{}-{}-{flags:02x}", context.trace_id(), context.span_id())))
    }

    /// Makes this the parent of a span that was not entered yet.
    pub fn adopt(&self, span: &Span) {
        let (Ok(trace), Ok(parent)) =
            (TraceId::from_hex(self.trace_id()), SpanId::from_hex(self.parent_id()))
        else {
            return;
        };
        // The lowest bit says whether the submitter records the trace; the other flags are not passed on.
        let flags = TraceFlags::NOT_SAMPLED.with_sampled(self.flags() & 1 == 1);
        let context = SpanContext::new(trace, parent, flags, true, TraceState::NONE);
        // Fails without a layer, and with a layer that does not record the span.
        let _ = span.set_parent(Context::new().with_remote_span_context(context));
    }
}

/// Marks the work of a span as failed.
pub fn mark_failed(span: &Span, why: &'static str) {
    span.set_status(Status::error(why));
}
