"""Speculative decoding (host side): methods that propose tokens, which the next step checks (`execution.verify`).

A method is a class in a module of its own, named in METHODS. Proposals change no token of an answer, only its speed.
"""
