"""What may watch a decode. Observers see the state after each step and never change it.

events     which positions a step drafted, revoked and promoted
flip_flops revocations that the next draft undoes
streaming  settled tokens to a transformers streamer
inspector  an observer that also sees the parts of a step; `StepClock` times them
"""
