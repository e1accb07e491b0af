"""Record a run: spans of time by lane, bytes by tier, and the resource that bound each step.

Promise: a step's seconds are its work plus its named waits, and sum to its wall time; bytes are counted when they have
arrived, never when they are requested; a record on disk can be read up to its last line, however the run ended.
Owner: `Recorder` owns the spans of a run, `Ledger` its bytes, `RunLog` its JSON lines, `TraceWriter` its trace.
Never: imports torch, decides anything that training depends on, logs a line for each step.

[Note: Lanes and kinds] A span is on a lane (LANES) and has a kind, by which it is summed: on compute `forward`,
`backward`, `step`; on any lane a named wait (WAIT_CAUSES), on the lane of the waiting thread. The seconds of a span
inside another one (opened on the same thread or lane) are taken from the outer span: forward's own seconds exclude
waits, and the driver's causes sum to its time whichever lanes it works for. A lane's busy time is the union of its
spans, since requests to a disk overlap, minus its waits and the work done for other lanes.
"""
