"""Progress of a run and of a training as it is shown, and partial results from which a run resumes."""
