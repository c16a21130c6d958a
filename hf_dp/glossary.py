"""One word, one idea: what the words in this library mean.

**row**: a row of a data set, as a user hands it over.

**example**: what a collator makes of one row, and what is clipped. The unit of privacy, unless a
plan says otherwise.

**sample**, **logical batch**: the examples of one optimizer step, drawn by a Poisson sampler. Its
size is random; the *expected batch size* is a public number.

**physical batch**: examples that pass through the model together. Memory and speed only.

**mechanism**: how privacy is obtained: a plan (:mod:`hf_dp.plans`), a step
(:mod:`hf_dp.mechanisms`) and its words. The argument that selects one is ``privacy_mode``.

**tuner**: what trains (:mod:`hf_dp.tuners`); selected by ``peft_config``.

**selection**: which of a model's own parameters train, and how they were chosen. A *private
selection* is chosen from noisy releases.

**event**: what the accountant is told of a release: frozen data, without an epsilon.

**purpose**: why an event is in the ledger: training, selection, release (once, before the first
step) or an earlier run.

**release**: to let a noised value out. It passes the gate (:mod:`hf_dp.run.gate`): the event is in
the durable ledger first. The argument ``release=["training_loss"]`` is the exception of the name:
it lets *un-noised* quantities out, and the card says so.

**noised loss**: the noised sum of the losses of one draw, each clipped to [0,
``noised_loss_bound``], / the expected batch size. Part of a step's release, where it is asked for.

**sensitivity**: the largest L2 distance by which one example can move what is noised.

**noise multiplier**, sigma: standard deviation of the noise / sensitivity.

**clipping norm**, C: the largest L2 norm with which one example enters a sum or a vector
(``per_example_max_grad_norm``, ``representation_clipping_norm``).

**vector**: what a mechanism releases of one example by itself, in DP-FP its representation.

**ledger**: the append-only list of events of a run. On disk it is ``ledger.jsonl``, a line
for each release; its *head* says how far it has come, so that it cannot go back.

**statement**: what may be claimed of a run, computed from its ledger. Its *status* is "proven",
"proven for the weights only", "not private" or "not established".

**bound**, **estimate**: an epsilon that the true one cannot exceed; one that it can.

**activations**, **output gradients**: what a layer was given, and the gradient of what it gave.
"""
