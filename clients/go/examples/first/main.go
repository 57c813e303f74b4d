// A first lock: the program of the README.
package main

import (
	"context"
	"fmt"
	"log"

	genie "github.com/genie-lock/genie/clients/go"
)

func main() {
	ctx := context.Background()
	client, err := genie.Dial(ctx, genie.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	err = client.Do(ctx, []string{"accounts/2", "shared:rates"}, func(ctx context.Context, lock *genie.Lock) error {
		fmt.Println("I hold", lock.Resources())
		return nil
	})
	if err != nil {
		log.Print(err)
	}
}
