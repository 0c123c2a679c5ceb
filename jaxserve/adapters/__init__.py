"""LoRA adapters on the host: reading the files of PEFT and llama.cpp in a process of its own, and the adapters that are
served. `execution.adapter_stacks` has their matrices on the devices."""
