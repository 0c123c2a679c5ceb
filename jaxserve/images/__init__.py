"""Pictures on the host: untrusted files are read (`reading`), turned into patches as the model's own settings say
(`processing`; what a family does otherwise is a module of its own), and given their places in a prompt (`prompts`),
among the tokens that the model wants (`layouts`)."""
