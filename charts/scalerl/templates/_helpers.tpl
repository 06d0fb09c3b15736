{{/* Names are cut to 53 characters, so that 10 are left for suffixes. */}}
{{- define "scalerl.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- define "scalerl.fullname" -}}
{{- $name := include "scalerl.name" . }}
{{- $full := printf "%s-%s" .Release.Name $name }}
{{- if .Values.fullnameOverride }}
{{- $full = .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}
{{- $full = .Release.Name }}
{{- end }}
{{- $full = $full | trunc 53 | trimSuffix "-" }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) }}
{{- fail (printf "a Service cannot be called %q, after this release: set fullnameOverride (letters, digits and dashes, a letter first)" $full) }}
{{- end }}
{{- $full }}
{{- end }}

{{/* Of objects of the cluster. Two releases may share a name; a colon is in neither part, so that none has another's. */}}
{{- define "scalerl.clusterName" -}}
{{ .Release.Namespace }}:{{ include "scalerl.fullname" . }}
{{- end }}

{{- define "scalerl.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "scalerl.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.create is false: name the account in serviceAccount.name" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Of the operator's pods. The first and the last are what NetworkPolicies of runs let in by, whatever the release is called. */}}
{{- define "scalerl.selectorLabels" -}}
app.kubernetes.io/name: scalerl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "scalerl.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "scalerl.labels" -}}
{{ include "scalerl.selectorLabels" . }}
{{ include "scalerl.commonLabels" . }}
{{- end }}

{{/* Of what restricts tenants, which is not of the operator. */}}
{{- define "scalerl.admissionLabels" -}}
app.kubernetes.io/name: scalerl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: admission
{{ include "scalerl.commonLabels" . }}
{{- end }}

{{/* (dict "root" $ "image" .Values.images.operator) → registry/repository:tag or @digest */}}
{{- define "scalerl.image" -}}
{{- $registry := .root.Values.images.registry | trimSuffix "/" }}
{{- $name := .image.repository }}
{{- if $registry }}{{ $name = printf "%s/%s" $registry $name }}{{ end }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{/* The Lease that the leader holds; in the release's namespace. */}}
{{- define "scalerl.lease" -}}
{{ include "scalerl.fullname" . }}-leader
{{- end }}

{{/* Both are what the `restricted` level of pod security asks for, and a read-only root beside. */}}
{{- define "scalerl.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "scalerl.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "scalerl.curvefitProbe" -}}
exec:
  command:
    - python
    - -IS
    - -c
    - import urllib.request; urllib.request.urlopen("http://127.0.0.1:{{ .Values.curvefit.port }}/healthz", timeout=4)
{{- end }}

{{/* What the operator does to runs and their objects, kind by kind, in each namespace that it watches. */}}
{{- define "scalerl.rules" -}}
- apiGroups: [scalerl.dev]
  resources: [scalerlruns]
  # patch: the finalizer, and suspend when a forecast stops a run; delete: ttlSecondsAfterFinished.
  verbs: [get, list, watch, patch, delete]
- apiGroups: [scalerl.dev]
  resources: [scalerlruns/status]
  verbs: [patch]
- apiGroups: [scalerl.dev]
  resources: [scalerlruns/finalizers]
  # Owner references that block a deletion.
  verbs: [update]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  # No delete: what holds data goes with its run, by its owner reference, or not at all.
  resources: [configmaps, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  # A run's token is made once. No list and no watch: those would show every secret there is.
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  # delete: what a failed gang has left, which may hang for minutes.
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  # It stays as long as its run.
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  # Whether the queue that a run names exists.
  resources: [localqueues]
  verbs: [get]
- apiGroups: [kueue.x-k8s.io]
  # A run's place in the queue.
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  # After an eviction, the quota is given back.
  resources: [workloads/status]
  verbs: [patch]
- apiGroups: [""]
  # list: why a pod of a run cannot start, in the kubelet's words.
  resources: [events]
  verbs: [list, create, patch]
{{- end }}
