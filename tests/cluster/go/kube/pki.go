package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Who speaks to the API server, and as what. The names and groups are those that Kubernetes's own bootstrap
// roles are bound to.
var clients = map[string]pkix.Name{
	"admin":                   {CommonName: "admin", Organization: []string{"system:masters"}},
	"apiserver-kubelet":       {CommonName: "apiserver-kubelet", Organization: []string{"system:masters"}},
	"coredns":                 {CommonName: "coredns"},
	"kube-controller-manager": {CommonName: "system:kube-controller-manager"},
	"kube-proxy":              {CommonName: "system:kube-proxy"},
	"kube-scheduler":          {CommonName: "system:kube-scheduler"},
	"kubelet":                 {CommonName: "system:node:node", Organization: []string{"system:nodes"}},
	"volumes":                 {CommonName: "volumes", Organization: []string{"system:masters"}},
}

type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// pki DIRECTORY NAME... writes a certificate authority, the API server's certificate for the names and addresses
// given, a client certificate for each part of the cluster, and the key that signs service accounts' tokens.
func pki(arguments []string) error {
	if len(arguments) < 2 {
		return fmt.Errorf("pki DIRECTORY NAME...")
	}
	directory, names := arguments[0], arguments[1:]
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return err
	}
	ca, err := newAuthority(directory)
	if err != nil {
		return err
	}
	server := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "kube-apiserver"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, name := range names {
		if address := net.ParseIP(name); address != nil {
			server.IPAddresses = append(server.IPAddresses, address)
		} else {
			server.DNSNames = append(server.DNSNames, name)
		}
	}
	if err := ca.issue(directory, "apiserver", server); err != nil {
		return err
	}
	for name, subject := range clients {
		client := &x509.Certificate{Subject: subject, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		if err := ca.issue(directory, name, client); err != nil {
			return err
		}
	}
	return serviceAccountKey(directory)
}

func newAuthority(directory string) (*authority, error) {
	key, err := newKey(directory, "ca")
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "scalerl test cluster"},
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	certificate, err := sign(directory, "ca", template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &authority{certificate, key}, nil
}

func (ca *authority) issue(directory, name string, template *x509.Certificate) error {
	key, err := newKey(directory, name)
	if err != nil {
		return err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	_, err = sign(directory, name, template, ca.certificate, key.Public(), ca.key)
	return err
}

func sign(
	directory, name string, template, parent *x509.Certificate, public crypto.PublicKey, signer crypto.Signer,
) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().AddDate(1, 0, 0)
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, signer)
	if err != nil {
		return nil, err
	}
	if err := write(directory, name+".crt", "CERTIFICATE", der); err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func newKey(directory, name string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, write(directory, name+".key", "EC PRIVATE KEY", der)
}

func serviceAccountKey(directory string) error {
	key, err := newKey(directory, "service-accounts")
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return write(directory, "service-accounts.pub", "PUBLIC KEY", der)
}

func write(directory, name, kind string, der []byte) error {
	block := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	return os.WriteFile(filepath.Join(directory, name), block, 0o600)
}
