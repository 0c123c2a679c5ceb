"""Which tokens are computed next, on the host, with NumPy alone: `scheduler` chooses, `block_manager` owns the KV
pages, `running_table` holds the running sequences in arrays, `waiting` is the queue."""
