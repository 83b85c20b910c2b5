"""Codecs: how float32 numbers travel in fewer bytes. One kind per file; `named` finds one by its name.

codec     what a codec is: a value with an encoding
halves    bf16 and fp16: two bytes per number
int8      one byte per number, and a scale per 1024 numbers
topk      only the largest numbers, with their places
packing   a few numbers among many, in few bits
named     finds a codec by its name
pieces    encodes slices piece by piece, and checks what comes back
"""
