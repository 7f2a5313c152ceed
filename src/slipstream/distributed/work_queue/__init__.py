"""Dynamic work: items handed out as processes become free, the queue in the rendezvous store, and the journal of results."""
