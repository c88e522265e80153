"""The pure maths: objectives, advantages, aggregation, correction, selection, KL control; no model, file or device."""
