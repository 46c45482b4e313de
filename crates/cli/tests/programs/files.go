// Uses files from many goroutines. Go makes its system calls without libc, even where it uses libc.
package main

// #include <stdlib.h>
import "C"

import (
	"fmt"
	"os"
	"sync"
)

func main() {
	directory := os.Args[1]
	fmt.Println(C.abs(-1), os.WriteFile(directory+"/one", []byte("hello\n"), 0o644))
	text, err := os.ReadFile(directory + "/one")
	fmt.Printf("%q %v\n", text, err)
	var all sync.WaitGroup
	for i := range 16 {
		all.Add(1)
		go func() {
			defer all.Done()
			name := fmt.Sprintf("%s/%d", directory, i)
			for round := range 20 {
				if err := os.WriteFile(name, make([]byte, 1000*i+round), 0o600); err != nil {
					fmt.Println(err)
				}
				found, err := os.Stat(name)
				if err != nil || found.Size() != int64(1000*i+round) {
					fmt.Println("wrong size", err)
				}
			}
		}()
	}
	all.Wait()
	entries, err := os.ReadDir(directory)
	fmt.Println(len(entries), err, os.Rename(directory+"/1", directory+"/x"), os.Remove(directory+"/x"))
}
