"""What runs on the devices: `runner` owns parameters, cache and slots, and the compiled programs that change them;
`steps` and `forward` are these programs; `step_buffer` packs a plan into the buffer that a program reads."""
