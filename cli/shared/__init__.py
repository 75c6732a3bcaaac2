"""What commands share: the options that each has, the JOB argument, and which job is meant."""
