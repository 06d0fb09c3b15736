"""What is known of a run right now.

Lives here: asking the coordinator (:mod:`.client`), and what a person is shown of it
(:mod:`.snapshot`).

Never lives here: a decision, or a change of anything, except passing on a stop.
"""
