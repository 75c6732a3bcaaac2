"""What the routes share: submitting jobs, reading their events, responses whole or streamed."""
