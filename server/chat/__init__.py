"""From a conversation to its answer: the prompt by the chat template, the completions of a request, and their
reasoning, content and calls."""
