{{- define "torchrelay.name" -}}
{{- $name := .Chart.Name -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "torchrelay.secret" -}}
{{- .Values.existingSecret | default (include "torchrelay.name" .) -}}
{{- end -}}

{{/* selector (dict "root" $ "part" "gateway") */}}
{{- define "torchrelay.selector" -}}
app.kubernetes.io/name: torchrelay
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "torchrelay.labels" -}}
{{ include "torchrelay.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* the image of a target of deploy/Dockerfile: (dict "root" $ "target" "gateway") */}}
{{- define "torchrelay.image" -}}
{{- $images := .root.Values.images -}}
image: {{ with $images.registry }}{{ . }}/{{ end }}torchrelay-{{ .target }}:{{ $images.tag | default .root.Chart.AppVersion }}
imagePullPolicy: {{ $images.pullPolicy }}
{{- end -}}

{{/* what all pods have: (dict "root" $ "user" 10001) */}}
{{- define "torchrelay.pod" -}}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "torchrelay.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* an environment variable from the Secret: (dict "root" $ "name" "X" "key" "ray-token") */}}
{{- define "torchrelay.secretEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef: {name: {{ include "torchrelay.secret" .root }}, key: {{ .key }}}
{{- end -}}

{{- define "torchrelay.rayAddress" -}}
{{ include "torchrelay.name" . }}-head-svc:6379
{{- end -}}

{{/* compose's x-ray */}}
{{- define "torchrelay.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
{{ include "torchrelay.secretEnv" (dict "root" . "name" "RAY_AUTH_TOKEN" "key" "ray-token") }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_raylet_start_wait_time_s, value: "120"}
{{- end -}}

{{/* compose's x-service */}}
{{- define "torchrelay.serviceEnv" -}}
{{- $name := include "torchrelay.name" . -}}
{{- if .Values.redis.enabled }}
{{ include "torchrelay.secretEnv" (dict "root" . "name" "REDIS_PASSWORD" "key" "redis-password") }}
- name: TORCHRELAY_SERVICE_REDIS_URL
  value: redis://torchrelay:$(REDIS_PASSWORD)@{{ $name }}-redis:6379/0
{{- else }}
{{ include "torchrelay.secretEnv" (dict "root" . "name" "TORCHRELAY_SERVICE_REDIS_URL" "key" "redis-url") }}
{{- end }}
- {name: TORCHRELAY_SERVICE_SIGNER_URL, value: "http://{{ $name }}-signer:8643"}
- {name: TORCHRELAY_SERVICE_BLOB_URL, value: {{ .Values.blobs.url | default "file:///blobs" | quote }}}
- {name: TORCHRELAY_SERVICE_TRAINING, value: {{ .Values.training.enabled | quote }}}
- {name: TORCHRELAY_SERVICE_LOG_FORMAT, value: json}
{{- end -}}

{{- define "torchrelay.blobsVolume" -}}
{{- if not .Values.blobs.url -}}
- name: blobs
  persistentVolumeClaim: {claimName: {{ .Values.blobs.existingClaim | default (printf "%s-blobs" (include "torchrelay.name" .)) }}}
{{- end }}
{{- end -}}

{{- define "torchrelay.trainsVolume" -}}
- name: trains
  persistentVolumeClaim: {claimName: {{ .Values.training.existingClaim | default (printf "%s-trains" (include "torchrelay.name" .)) }}}
{{- end -}}

{{/* spec of a claim: (dict "size" "1Gi" "class" "" "mode" "ReadWriteOnce") */}}
{{- define "torchrelay.claim" -}}
accessModes: [{{ .mode }}]
{{- with .class }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end -}}

{{/* spread over nodes and zones: (dict "root" $ "part" "gateway") */}}
{{- define "torchrelay.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "torchrelay.selector" . | nindent 8 }}
{{- end -}}

{{/* groups of Ray nodes that are used, as JSON */}}
{{- define "torchrelay.groups" -}}
{{- $used := dict -}}
{{- range $name, $group := .Values.ray.groups -}}
{{- if ne (get $group "enabled" | toString) "false" -}}{{- $_ := set $used $name $group -}}{{- end -}}
{{- end -}}
{{- $used | toJson -}}
{{- end -}}
