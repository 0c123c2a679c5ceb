"""Pictures in requests: where they come from (`sources`), and the processes that read them (`workers`)."""
