"""Proof that jaxpar and torch compute the same from one checkpoint: `torch-bridge parity DIR`.

ladder     run_parity: logits, loss, gradients, optimizer steps
forward    logits, and every module's output to find where a difference starts
backward   loss and gradients
training   steps of the training program, random batches
report     differences by leaf; table, verdict, JSON
command    the command line
"""
