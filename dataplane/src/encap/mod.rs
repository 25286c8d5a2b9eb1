//! Push and pop of the outer headers, one file per encapsulation.
