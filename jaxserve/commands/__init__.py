"""The command line `jaxserve`: a module for each group of commands, and the flags that they share."""
