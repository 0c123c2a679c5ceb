"""The HTTP server: OpenAI's and Anthropic's endpoints in front of the engine. `process` starts and ends processes,
`ipc` is between them, `http` is what all endpoints share, `endpoints` has a file for each. Imported as
`jaxserve.server`; nothing in `jaxserve` imports it but the command line."""
