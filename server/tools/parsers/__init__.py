"""One module per format in which models write tool calls.

Each defines `Parser`, a ToolParser, and `matches(template)`, whether a chat template certainly asks for this format.
"""
