"""Pictures on the host: untrusted files are read (`reading`), turned into patches as the model's own settings say
(`processing`; what a family does otherwise is a module of its own), and given their places in a prompt (`prompts`) with
the tokens around them (`layouts`)."""
