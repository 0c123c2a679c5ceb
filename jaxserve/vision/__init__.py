"""Models that see: from the bytes of a picture to embeddings in the place of its tokens.

On the host, `reading` checks untrusted files, and `processing` turns pictures into patches as the model's own settings
say (in processes beside the API server, `workers`). On the devices, `encoder` computes embeddings of patches, which
`runner` writes to rows of an array that steps read. `spec` has the shapes of encoders, `packing` lays the patches of
several pictures out in one of a few fixed sizes, `positions` numbers tokens in two dimensions.
"""
