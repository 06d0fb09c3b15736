"""Who generates what, and what makes a batch: the one process of a run that remembers.

Lives here, from the inside out:

- pure arithmetic, one question a module: :mod:`.clock` (time that a pause cannot jump), :mod:`.slots`
  (staleness), :mod:`.curriculum` (which prompt), :mod:`.batcher` (what a step is made of, who gets which
  part), :mod:`.evaluation` (points of the curve), :mod:`.accounting` (totals);
- :mod:`.records` and :mod:`.state` (with :mod:`.rollout_records` and :mod:`.trainer_records`): everything that must
  survive, as a state machine whose only door is ``apply(record)``; live operation and replay go through the same one;
- :mod:`.membership` and :mod:`.leases`: what may be forgotten at a restart (heartbeats, deadlines);
- :mod:`.core`, :mod:`.rollouts`, :mod:`.training`, :mod:`.status`: decisions. They read the state, emit
  records, and know neither sockets, nor files, nor clocks;
- I/O: :mod:`.journal` (read back by :mod:`.recovery`, its byte layout in :mod:`.frames`), :mod:`.files`,
  :mod:`.server` behind the door of :mod:`.http`, :mod:`.metrics`, :mod:`.main`.

Never lives here: torch, a model, a tokenizer, token-by-token work in Python, or a client of this server.
"""
