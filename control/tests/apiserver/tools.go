//go:build tools

// Package apiserver names the one program the tests build from Kubernetes: its API server.
package apiserver

import _ "k8s.io/kubernetes/cmd/kube-apiserver/app"
