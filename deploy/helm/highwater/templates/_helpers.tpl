{{- define "highwater.labels" -}}
app.kubernetes.io/name: highwater
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "highwater.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{/* Settings from the ConfigMap, secrets by reference: of every container, those of runs too. */}}
{{- define "highwater.env" -}}
- {name: HIGHWATER_HOME, value: /var/lib/highwater}
- {name: DAGSTER_HOME, value: /opt/dagster}
- {name: CODE_SERVER_HOST, value: {{ .Release.Name }}-code}
{{- range $name, $from := .Values.secrets }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef: {name: {{ $from.name }}, key: {{ $from.key }}}
{{- end }}
{{- end }}

{{- define "highwater.remote" -}}
{{- if .Values.spark.enabled -}}sc://{{ .Release.Name }}-spark:15002{{- else -}}{{ .Values.spark.remote }}{{- end -}}
{{- end }}

{{/* Of every pod and container, those of runs too. */}}
{{- define "highwater.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "highwater.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* Argument: root. */}}
{{- define "highwater.pod" -}}
serviceAccountName: {{ .root.Release.Name }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "highwater.podSecurity" . | nindent 2 }}
volumes:
  - name: config
    configMap: {name: {{ .root.Release.Name }}}
  - name: home
    emptyDir: {}
  {{- with .root.Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Arguments: root, name, resources. */}}
{{- define "highwater.container" -}}
name: {{ .name }}
image: {{ include "highwater.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext: {{- include "highwater.containerSecurity" . | nindent 2 }}
envFrom:
  - configMapRef: {name: {{ .root.Release.Name }}-settings}
env: {{- include "highwater.env" .root | nindent 2 }}
volumeMounts:
  - {name: home, mountPath: /var/lib/highwater}
  - {name: config, mountPath: /opt/dagster/dagster.yaml, subPath: dagster.yaml}
  - {name: config, mountPath: /opt/project/workspace.yaml, subPath: workspace.yaml}
  {{- with .root.Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources: {{- toYaml .resources | nindent 2 }}
{{- end }}
