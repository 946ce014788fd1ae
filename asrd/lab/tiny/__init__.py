"""The trained models of the package, their task and how they were trained.

The task        language: words and sentences; task: problems, split, graders; tokenizer: a real word-level one
The models      model: the transformer; export: the folder that `asrd.load` reads; weights/: the trained ones
Their training  batch: problems as tensors; noise: masks, planted errors, own drafts; recipe: plain, edit, shift;
                start: the first weights; schedule: what changes on the way; state: checkpoints; train: the command
Their strength  decode: two plain decoders; evaluate: the command; curve: learning curves; provenance: where weights
                come from
"""
