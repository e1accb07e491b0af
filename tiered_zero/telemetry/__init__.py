"""Record a run: spans of time by lane, bytes by tier, and the resource that bound each step.

Promise: a step's seconds of work and of named waits sum to its wall time; bytes are counted when they have arrived; a
record on disk can be read up to its last line, however the run ended. Owner: `Recorder` owns the spans of a run,
`Ledger` its bytes, `RunLog` its JSON lines, `TraceWriter` its trace. Never: imports torch, decides anything that
training depends on, logs a line for each step.

[Note: Lanes and kinds] A span is an interval of time on a lane (LANES), which is a worker thread or a link. Its kind
says what was done: `forward`, `backward` or `step` on the lane `compute`; other work; or a named wait (WAIT_CAUSES), on
the lane of the waiting thread. Seconds are summed by kind. The seconds of an inner span are subtracted from the span
around it on the same thread or lane. So the seconds of the driver's kinds (the causes) sum to the driver's time. A
lane's busy time is the union of its spans, minus its waits and minus the work for other lanes inside its spans.
"""
