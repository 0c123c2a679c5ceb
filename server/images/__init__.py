"""Pictures and videos in requests: where they come from (`sources`, `video_sources`), in pieces (`long_strings`), and
the processes that read them (`workers`)."""
