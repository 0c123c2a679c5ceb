"""Reads and writes model files, whatever wrote them: safetensors, GGUF, Orbax, and other projects' formats of quantized
weights (`formats`). `files` opens files of strangers, `load` streams their tensors to the devices, `hub` finds a model
by name. Imported as `jaxserve.checkpoints`; it knows neither models nor the engine."""
