{{- define "genie.fullname" -}}
{{- if contains "genie" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-genie" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "genie.selectorLabels" -}}
app.kubernetes.io/name: genie
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "genie.labels" -}}
{{ include "genie.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "genie.peersDomain" -}}
{{ include "genie.fullname" . }}-peers.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{- define "genie.addresses" -}}
{{- $names := list }}
{{- range $i := until (int .Values.replicas) }}
{{- $names = append $names (printf "%s-%d.%s:%d" (include "genie.fullname" $) $i (include "genie.peersDomain" $) (int $.Values.service.port)) }}
{{- end }}
{{- join "," $names }}
{{- end }}
