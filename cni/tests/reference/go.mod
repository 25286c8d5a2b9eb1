// The release of the reference plugins that `make test-reference` builds and compares felt with.
module felt/reference

go 1.24.2

require github.com/containernetworking/plugins v1.9.1
