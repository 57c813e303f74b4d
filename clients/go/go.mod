module github.com/genie-lock/genie-go

go 1.19
