"""Checkpoints, without their bytes.

schedule       when to save, what to keep
snapshot       one consistent point across servers
manifest       what a checkpoint has
tensor_file    the layout of a tensor file
soundness      whether a checkpoint is complete, and what is wrong with it
restoring      which slice comes from where
"""
