package main

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/vbatts/tar-split/tar/asm"
	"github.com/vbatts/tar-split/tar/storage"
)

// layer STORE ID writes to its output the archive that a layer in an image builder's store was unpacked from, byte
// by byte: the store keeps the files, and beside them what else was in the archive.
func layer(arguments []string) error {
	if len(arguments) != 2 {
		return fmt.Errorf("layer STORE ID")
	}
	store, id := arguments[0], arguments[1]
	packed, err := os.Open(filepath.Join(store, "overlay-layers", id+".tar-split.gz"))
	if err != nil {
		return err
	}
	defer packed.Close()
	recipe, err := gzip.NewReader(packed)
	if err != nil {
		return err
	}
	files := storage.NewPathFileGetter(filepath.Join(store, "overlay", id, "diff"))
	archive := asm.NewOutputTarStream(files, storage.NewJSONUnpacker(recipe))
	defer archive.Close()
	_, err = io.Copy(os.Stdout, archive)
	return err
}
