"""What the routes share: submitting jobs, waiting for their events, answers whole or streamed."""
