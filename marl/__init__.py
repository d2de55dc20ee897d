"""Training language models on language games with listening losses and speaking rewards."""
