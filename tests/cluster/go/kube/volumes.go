package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	provisioner    = "scalerl.dev/directories"
	wantsVolume    = "volume.kubernetes.io/storage-provisioner" // the controller-manager writes it on a claim
	provisionedBy  = "pv.kubernetes.io/provisioned-by"
	resyncInterval = 10 * time.Second // what failed once is tried again then
)

// volumes gives each claim of its storage class a directory of this machine, owned by one user and group: the
// kubelet does not apply fsGroup to a hostPath, and roles do not run as root. Every access mode is served, as
// all pods are on one node. With a volume released, its directory goes.
func volumes(arguments []string) error {
	flags := flag.NewFlagSet("volumes", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "how to reach the API server")
	root := flags.String("root", "", "the directory that holds the volumes")
	owner := flags.Int("owner", 10001, "user and group that volumes belong to")
	_ = flags.Parse(arguments)
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	keeper := &keeper{client, *root, *owner}
	factory := informers.NewSharedInformerFactory(client, resyncInterval)
	claims := factory.Core().V1().PersistentVolumeClaims().Informer()
	held := factory.Core().V1().PersistentVolumes().Informer()
	if err := watch(claims, func(object any) error { return keeper.provide(ctx, object.(*core.PersistentVolumeClaim)) }); err != nil {
		return err
	}
	if err := watch(held, func(object any) error { return keeper.release(ctx, object.(*core.PersistentVolume)) }); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	return nil
}

func watch(informer cache.SharedIndexInformer, look func(object any) error) error {
	report := func(object any) {
		if err := look(object); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    report,
		UpdateFunc: func(_, object any) { report(object) },
	})
	return err
}

type keeper struct {
	client *kubernetes.Clientset
	root   string
	owner  int
}

func (k *keeper) provide(ctx context.Context, claim *core.PersistentVolumeClaim) error {
	if claim.Annotations[wantsVolume] != provisioner || claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil {
		return nil
	}
	name := "pvc-" + string(claim.UID)
	directory := filepath.Join(k.root, name)
	if err := os.MkdirAll(directory, 0o770); err != nil {
		return err
	}
	if err := os.Chown(directory, k.owner, k.owner); err != nil {
		return err
	}
	// setgid: what the kubelet makes below for a subPath, as root, is the group's too.
	if err := os.Chmod(directory, 0o770|os.ModeSetgid); err != nil {
		return err
	}
	kind := core.HostPathDirectory
	volume := &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{Name: name, Annotations: map[string]string{provisionedBy: provisioner}},
		Spec: core.PersistentVolumeSpec{
			AccessModes:                   claim.Spec.AccessModes,
			Capacity:                      core.ResourceList{core.ResourceStorage: claim.Spec.Resources.Requests[core.ResourceStorage]},
			PersistentVolumeReclaimPolicy: core.PersistentVolumeReclaimDelete,
			StorageClassName:              *claim.Spec.StorageClassName,
			ClaimRef: &core.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			PersistentVolumeSource: core.PersistentVolumeSource{
				HostPath: &core.HostPathVolumeSource{Path: directory, Type: &kind},
			},
		},
	}
	if _, err := k.client.CoreV1().PersistentVolumes().Create(ctx, volume, meta.CreateOptions{}); !errors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

func (k *keeper) release(ctx context.Context, volume *core.PersistentVolume) error {
	if volume.Annotations[provisionedBy] != provisioner || volume.Status.Phase != core.VolumeReleased ||
		volume.Spec.PersistentVolumeReclaimPolicy != core.PersistentVolumeReclaimDelete || volume.DeletionTimestamp != nil {
		return nil
	}
	if err := os.RemoveAll(filepath.Join(k.root, volume.Name)); err != nil {
		return err
	}
	if err := k.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, meta.DeleteOptions{}); !errors.IsNotFound(err) {
		return err
	}
	return nil
}
