"""The trained models of the package, their task and how they were trained.

language    words and sentences             task       problems, split, graders
tokenizer   a real word-level tokenizer     model      the transformer
batch       problems as tensors             noise      masks, planted errors, own drafts
recipe      plain, edit, shift: the loss    schedule   what changes in the course of training
decode      two plain decoders, to judge    curve      the learning curve on disk
export      the folder `asrd.load` reads    train      the command that made the models
visible     are logits at visible positions worth anything      evaluate   scores exported models
numbers     how number embeddings start
"""
