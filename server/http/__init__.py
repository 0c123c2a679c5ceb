"""What all endpoints share: state, settings, limits, keys, errors, bodies and server-sent events."""
