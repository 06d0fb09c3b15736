// Command kube is a whole Kubernetes in one binary: its own name or else the first argument says which part runs.
//
// Beside Kubernetes's own programs there are etcd and five small helpers that a test cluster needs: pki writes its
// certificates, volumes provisions directories as persistent volumes, sandboxes clears a node of its pods, unreal
// plays nodes that are not there, layer reads an image builder's store.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
}

var helpers = map[string]func(arguments []string) error{
	"layer":     layer,
	"etcd":      func(arguments []string) error { etcdmain.Main(append([]string{"etcd"}, arguments...)); return nil },
	"pki":       pki,
	"volumes":   volumes,
	"sandboxes": sandboxes,
	"unreal":    unreal,
}

func main() {
	arguments := os.Args
	if !known(filepath.Base(arguments[0])) {
		arguments = arguments[1:]
	}
	if len(arguments) == 0 || !known(filepath.Base(arguments[0])) {
		usage()
	}
	name := filepath.Base(arguments[0])
	os.Args = append([]string{name}, arguments[1:]...)
	if command, ok := programs[name]; ok {
		os.Exit(cli.Run(command()))
	}
	if err := helpers[name](os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

func known(name string) bool {
	return programs[name] != nil || helpers[name] != nil
}

func usage() {
	var names []string
	for name := range programs {
		names = append(names, name)
	}
	for name := range helpers {
		names = append(names, name)
	}
	slices.Sort(names)
	fmt.Fprintf(os.Stderr, "kube PROGRAM [ARGUMENTS]; programs: %s\n", strings.Join(names, ", "))
	os.Exit(2)
}
