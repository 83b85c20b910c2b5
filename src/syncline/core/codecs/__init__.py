"""Codecs: how float32 numbers travel in fewer bytes. One kind per file; `named` finds one by its name.

A codec is a value (`codec.py`). `pieces` encodes slices with it, piece by piece, and checks what comes back.
"""
