"""The trained models of the package, their task and their training.

task        language: words and sentences; task: problems, split, graders; tokenizer: word-level
models      model: the transformer; export: the folder that `asrd.load` reads (asrd/models/packaged/)
training    batch: problems as tensors; noise: masks, planted errors, own drafts; recipe: plain, edit, shift;
            initialisation: first weights; schedule: learning rate and data mix; state: checkpoints; train: the command
evaluation  decode: two simple decoders; evaluate: the command; curve: learning curves; provenance: origin of weights
"""
