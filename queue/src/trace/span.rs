//! Spans of `tracing` in the traces of OpenTelemetry. Without its layer all of this does nothing.

use opentelemetry::{
    Context, SpanId, TraceFlags, TraceId,
    trace::{SpanContext, Status, TraceContextExt as _, TraceState},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::TraceParent;

impl TraceParent {
    /// Returns the position of a span in its trace; `None` if it is not recorded.
    pub fn of_span(span: &Span) -> Option<Self> {
        let context = span.context();
        let span = context.span();
        let context = span.span_context().clone();
        if !context.is_valid() {
            return None;
        }
        let flags = context.trace_flags().to_u8();
        format!("00-{}-{}-{flags:02x}", context.trace_id(), context.span_id()).parse().ok()
    }

    /// Makes this the parent of a span that was not entered yet.
    pub fn adopt(&self, span: &Span) {
        let (Ok(trace), Ok(parent)) =
            (TraceId::from_hex(self.trace_id()), SpanId::from_hex(self.parent_id()))
        else {
            return;
        };
        // The lowest bit says whether the submitter records the trace; the other flags are not passed on.
        let flags = u8::from_str_radix(&self.0[53..], 16).unwrap_or_default();
        let flags = TraceFlags::NOT_SAMPLED.with_sampled(flags & 1 == 1);
        let context = SpanContext::new(trace, parent, flags, true, TraceState::NONE);
        // Fails if there is no layer, or if it does not record the span.
        let _ = span.set_parent(Context::new().with_remote_span_context(context));
    }
}

/// Marks the work of a span as failed.
pub fn mark_failed(span: &Span, why: &'static str) {
    span.set_status(Status::error(why));
}
