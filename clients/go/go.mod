module github.com/genie-lock/genie/clients/go

go 1.23
