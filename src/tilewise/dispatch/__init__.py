"""From a call to the backend and the plan that serve it."""
