"""Image encoders: shapes (`spec`), layers, which are those of decoders (`encoder`), and their families, a file each."""
