{{- define "jaxserve.name" -}}
{{- contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "jaxserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The pods that serve HTTP: with several hosts the first of each replica. */}}
{{- define "jaxserve.serving" -}}
{{ include "jaxserve.selector" . }}
{{- if gt (int .Values.hosts) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- define "jaxserve.labels" -}}
{{ include "jaxserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "jaxserve.secret" -}}
{{ .Values.secret.name | default (include "jaxserve.name" .) }}
{{- end }}

{{- define "jaxserve.target" -}}
{{- if gt (int .Values.hosts) 1 }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else }}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "jaxserve.name" . }}
{{- end }}

{{- define "jaxserve.metric" -}}
{{ printf "%s:%s" .root.Values.metricsPrefix .name }}
{{- end }}

{{- define "jaxserve.args" -}}
- serve
- {{ .Values.model | quote }}
- --host=0.0.0.0
- --port={{ .Values.port }}
- --metrics-prefix={{ .Values.metricsPrefix }}
- --drain-delay={{ .Values.drain.delaySeconds }}
- --drain-seconds={{ .Values.drain.seconds }}
{{- range .Values.servedModelNames }}
- --served-model-name={{ . }}
{{- end }}
{{- $devices := mul .Values.hosts (max 1 .Values.accelerator.count) }}
{{- $groups := mul .Values.dataParallelSize .Values.pipelineParallelSize }}
{{- if mod $devices $groups }}
{{- fail (printf "dataParallelSize x pipelineParallelSize must divide the %d devices of a replica, got %d" $devices $groups) }}
{{- end }}
{{- with .Values.tensorParallelSize | default (div $devices $groups) }}
{{- if gt (int .) 1 }}
- --tensor-parallel-size={{ . }}
{{- end }}
{{- end }}
{{- if gt (int .Values.dataParallelSize) 1 }}
- --data-parallel-size={{ .Values.dataParallelSize }}
{{- end }}
{{- if gt (int .Values.pipelineParallelSize) 1 }}
- --pipeline-parallel-size={{ .Values.pipelineParallelSize }}
{{- end }}
{{- if .Values.auth.apiKeys }}
- --api-key-file=/etc/jaxserve/api-keys
{{- end }}
{{- if gt (int .Values.hosts) 1 }}
- --coordinator=auto
{{- end }}
{{- with .Values.role }}
{{- if ne .kind "both" }}
- --role={{ .kind }}
- --kv-offload-gib={{ .kvOffloadGib }}
{{- end }}
{{- if eq .kind "prefill" }}
- --prefill-listen=0.0.0.0:{{ .prefillPort }}
{{- else if eq .kind "decode" }}
- --prefill-servers={{ join "," .prefillServers }}
{{- end }}
{{- end }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "jaxserve.environment" -}}
- name: HOME
  value: /cache
- name: HF_HOME
  value: /cache/hub
- name: JAXSERVE_CACHE
  value: /cache/xla
{{- $secret := include "jaxserve.secret" . }}
{{- range $variable, $key := dict "JAXSERVE_ADMIN_KEY" "admin-key" "JAXSERVE_METRICS_KEY" "metrics-key" "HF_TOKEN" "hub-token" }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ $key }}
      optional: true
{{- end }}
{{- if or (gt (int .Values.hosts) 1) (ne .Values.role.kind "both") }}
- name: JAXSERVE_HOST_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: host-secret
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "jaxserve.resources" -}}
{{- $resource := get (dict "nvidia" "nvidia.com/gpu" "tpu" "google.com/tpu" "none" "") .Values.accelerator.type }}
{{- $resources := deepCopy .Values.resources }}
{{- if $resource }}
{{- range $bound := list "requests" "limits" }}
{{- $_ := set $resources $bound (merge (dict $resource $.Values.accelerator.count) (get $resources $bound | default dict)) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* The pod of one host. `serves`: whether it serves HTTP; with several hosts only the first one does. */}}
{{- define "jaxserve.pod" -}}
{{- $root := .root }}
{{- with .root.Values }}
metadata:
  labels:
    {{- include "jaxserve.selector" $root | nindent 4 }}
    {{- with .podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- if not .secret.name }}
    checksum/secret: {{ toJson .secret.create | sha256sum }}
    {{- end }}
    {{- with .podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  terminationGracePeriodSeconds: {{ add .drain.delaySeconds .drain.seconds 30 }}
  automountServiceAccountToken: false
  {{- with .serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .podSecurityContext | nindent 4 }}
  {{- $nodes := deepCopy .nodeSelector }}
  {{- if eq .accelerator.type "tpu" }}
  {{- with .accelerator.tpu.accelerator }}{{ $_ := set $nodes "cloud.google.com/gke-tpu-accelerator" . }}{{ end }}
  {{- with .accelerator.tpu.topology }}{{ $_ := set $nodes "cloud.google.com/gke-tpu-topology" . }}{{ end }}
  {{- end }}
  {{- with $nodes }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: jaxserve
      image: {{ printf "%s:%s" .image.repository (.image.tag | default $root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .image.pullPolicy }}
      command: [jaxserve]
      args:
        {{- include "jaxserve.args" $root | nindent 8 }}
      env:
        {{- include "jaxserve.environment" $root | nindent 8 }}
      {{- if $.serves }}
      ports:
        - name: http
          containerPort: {{ .port }}
        {{- if eq .role.kind "prefill" }}
        - name: prefill
          containerPort: {{ .role.prefillPort }}
        {{- end }}
      startupProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml .probes.startup | nindent 8 }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        {{- toYaml .probes.readiness | nindent 8 }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml .probes.liveness | nindent 8 }}
      {{- end }}
      resources:
        {{- include "jaxserve.resources" $root | nindent 8 }}
      securityContext:
        {{- toYaml .securityContext | nindent 8 }}
      volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if .auth.apiKeys }}
        - {name: keys, mountPath: /etc/jaxserve, readOnly: true}
        {{- end }}
        {{- with .extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: cache
      {{- if .cache.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ .cache.existingClaim }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ .cache.size }}
      {{- end }}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .sharedMemory }}
    {{- if .auth.apiKeys }}
    - name: keys
      secret:
        secretName: {{ include "jaxserve.secret" $root }}
        items:
          - {key: api-keys, path: api-keys}
    {{- end }}
    {{- with .extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
